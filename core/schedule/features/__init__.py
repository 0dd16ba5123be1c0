"""Step features: what a step does beyond computing tokens, one file each (`feature.StepFeature` is their protocol)."""

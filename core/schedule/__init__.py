"""The scheduler: requests and rows, KV blocks and prefix caching, and the policies that make a `StepPlan`."""

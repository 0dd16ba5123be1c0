"""JSON bodies to request structs, and what is known of fields that a struct lacks."""

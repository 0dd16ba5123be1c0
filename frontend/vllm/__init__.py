"""What makes Headrace look like vLLM: its module names, config objects, engine classes and refusals by name."""

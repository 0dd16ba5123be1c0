"""How models write reasoning and tool calls: one declaration each, one parser for all (see README.md)."""

"""Formats in which models write reasoning and tool calls: a declaration each, one parser for all (see README.md)."""

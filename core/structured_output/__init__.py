"""Structured outputs: grammars are compiled on threads beside the loop, and applied token by token."""

"""Grammars of answers: compiled beside the loop, followed token by token."""

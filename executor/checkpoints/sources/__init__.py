"""Tensors of a checkpoint's files, by kind of file. See README.md."""

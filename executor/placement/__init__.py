"""Where ranks run: in process, in worker processes, on several nodes, under Ray or torchrun."""

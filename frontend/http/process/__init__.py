"""`headrace serve` as processes: one that serves, or several and their parent."""

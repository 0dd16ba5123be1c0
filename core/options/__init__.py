"""What was asked and what was decided: option declarations, their parsing, `resolve`, `Plan` and `Facts`."""

"""Options as given and the decisions made from them: declarations, parsing, `resolve`, `Plan` and `Facts`."""

"""The processes of `headrace serve`: one HTTP process, or several and their parent."""

"""The kinds of cache groups, one file each (`group.GroupBlocks` is their protocol)."""

from headrace.core.schedule.groups import full, state, window  # noqa: F401  (they register their kinds)

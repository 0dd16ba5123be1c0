"""What every rank does with a step, whatever its device: the rows' state, a step's arrays, and accepted drafts."""

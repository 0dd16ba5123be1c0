"""jsonschema's judgement of values, with each schema itself checked once: that takes longer than most values."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema


def validate(value: Any, schema: Any) -> None:
    """As jsonschema.validate: raises ValidationError, or SchemaError."""
    _validator(json.dumps(schema)).validate(value)


@functools.cache
def _validator(schema: str) -> Any:
    decoded = json.loads(schema)
    judge = jsonschema.validators.validator_for(decoded)
    judge.check_schema(decoded)
    return judge(decoded)

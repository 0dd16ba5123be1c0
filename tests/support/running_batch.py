"""A batch as a server's store has it while it runs."""

from __future__ import annotations

from headrace.frontend.http.apis.files.store import BatchObject, RequestCounts


def running_batch() -> BatchObject:
    return BatchObject(
        id="batch_1",
        endpoint="/v1/chat/completions",
        input_file_id="file-1",
        completion_window="24h",
        status="in_progress",
        created_at=1,
        expires_at=2**31,
        request_counts=RequestCounts(),
    )

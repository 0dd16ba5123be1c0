"""The other side of the ring's round trip: run as a program with two descriptors and a number of messages."""

from __future__ import annotations

import sys

from headrace.frontend.bench.overhead import RING_MESSAGE_BYTES, STEP_TIMEOUT_S
from headrace.ipc.ring import RingLayout, RingReader, RingWriter
from headrace.ipc.wait import Deadline


def main() -> None:
    inward, outward, count = (int(argument) for argument in sys.argv[1:])
    layout = RingLayout.holding(RING_MESSAGE_BYTES, 8, 1)
    reader, writer = RingReader(inward, layout, 0), RingWriter(outward, layout)
    deadline = Deadline(STEP_TIMEOUT_S)
    for _ in range(count):
        _, message = reader.take(deadline)
        writer.put(bytes(message), deadline)


if __name__ == "__main__":
    main()

"""The engine core: options and plan, requests, scheduler, KV block accounting, busy loop. See README.md."""

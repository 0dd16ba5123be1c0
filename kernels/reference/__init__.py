"""The plain torch reference of every op. A module's `REFERENCES` names the ops it defines."""

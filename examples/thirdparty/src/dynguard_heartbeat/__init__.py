"""Plugins for dynguard: ``pulse`` finds a run that no longer learns, ``heartbeat`` shows that it is alive."""

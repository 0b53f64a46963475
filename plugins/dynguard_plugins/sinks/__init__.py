"""First-party plugins: sinks."""

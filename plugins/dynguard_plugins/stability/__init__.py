"""First-party plugins: stability."""

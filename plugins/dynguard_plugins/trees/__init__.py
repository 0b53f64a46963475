"""First-party plugins: trees."""

"""First-party plugins, found through entry points like anyone else's."""

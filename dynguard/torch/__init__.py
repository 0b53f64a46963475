"""What needs torch: sources, statistics, recovery, attribution, ranks and deferred reads."""

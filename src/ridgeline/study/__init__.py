"""Which model does the job soonest: races, comparisons and searches over whole training runs."""

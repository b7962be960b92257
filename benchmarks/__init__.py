"""Speed, as ratios within one run; one script a question."""

"""Programs that measure: each writes JSON rows that carry the set-up they were taken with."""

"""A flowtable for the flows that vipd translated, beside the rules of either dataplane. The daemon and
`vipctl cleanup` import it."""

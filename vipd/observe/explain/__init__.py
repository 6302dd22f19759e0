"""`vipctl explain`: what the compiled rules do to one packet. Pure: reads neither kernel nor files.

`query` (what is asked), `explanation` (the answer), `explanation_text` and `rule_words` (its words). The API,
`vipctl` and `live_trace` may import it.
"""

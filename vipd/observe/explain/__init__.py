"""`vipctl explain`: the effect of the compiled rules on one packet. Pure: reads neither kernel nor files.

`query` (the request), `explanation` (the result), `explanation_text` and `rule_words` (its words). The API,
`vipctl` and `live_trace` may import it.
"""

"""The checks, one file for each family of them. All pure: facts in, judgements out."""

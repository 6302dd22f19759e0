"""Who is fit to serve: backends are asked, their answers are made into verdicts. The door is `door.py`."""

"""Tests of events: kept on disk, told to followers, shown by vipctl."""

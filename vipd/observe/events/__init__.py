"""What has happened, with reason and cause: log records with an event become a ring on disk and a stream."""

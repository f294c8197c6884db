"""What a run tells while it trains: metrics, live progress, transcripts, and where it ran."""

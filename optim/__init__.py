"""Parameter groups, Muon, AdamW, schedules and clipping."""

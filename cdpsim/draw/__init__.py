"""Pictures of traces; they know nothing of particular schedules."""

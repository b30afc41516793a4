"""Pictures of traces and of studies; no picture knows a particular schedule."""

"""Running the slices of an artifact as one pipeline: scheduler, KV pages, sampler, workers and transport."""

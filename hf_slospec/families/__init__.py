"""Models whose layers keep states, attend by themselves or to an encoder, or are split over processes."""

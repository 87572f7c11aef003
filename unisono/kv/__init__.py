"""State that requests leave on the device: declared by specs, allocated and owned by one store.

Three kinds: *paged* state lives in pages of tokens that a page table finds; *per-slot* state lives as long as the
request; a *tail* is a recurrence: a snapshot at an aligned position and the inputs since. The target model and the
drafter declare theirs through ``state_specs()``. Host-side bookkeeping never touches the device.
"""

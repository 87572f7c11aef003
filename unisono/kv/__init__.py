"""State that requests keep on the device: declared by specs, allocated and owned by one store.

There are three kinds. *Paged* state lives in pages of tokens, found through a page table. *Per-slot* state lives as
long as the request. *Recurrent* state is a snapshot at an aligned position plus the inputs since then. The target model
and the drafter declare theirs through ``state_specs()``. Host-side bookkeeping never touches the device.
"""

"""Engine processes and the API process's side of them; replicas and their router."""

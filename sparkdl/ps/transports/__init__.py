"""Ways for frames to travel: http (Flask), socket, shm, inproc. All thin, one contract suite."""

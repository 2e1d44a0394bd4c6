"""The strategies of every operator of a traced step on a mesh, and what each costs."""

"""What `vipd.dataplane.base.Dataplane` promises, asked of every dataplane, and of the fake of one."""

"""One target over several hosts: process 0 leads, the others run the same programs.

`channel` carries commands from the leader to the followers, in order and signed;
`facts` compares the processes at the start; `follower` runs the commands.
"""

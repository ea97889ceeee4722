"""wrap never returns. The judge should say: hung."""



def wrap(module):
    while True:
        pass

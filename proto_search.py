from proto_dp import *
from tensile_jax.plan.search.local import repair, improve
import cProfile, pstats
def solve(name, shares, swaps=True, budget=3000, verbose=True, prices=(0.6,0.36,0.165,0.05,0.01)):
    t=time.time()
    c,rets,s,_=setup(name)
    base=1.0
    m=Model(s,c.profile)
    bit={t:i for i,t in enumerate(s.tensors)}
    van=c.unplanned_bytes
    W={"resnet50":1734214800,"vgg16":2776590638,"gpt":469722940}.get(name) or van
    V={"resnet50":2869.518,"vgg16":5506.112,"gpt":733.97}.get(name) or c.whole_us
    ends={}
    for r,pr in zip(rets,(4.0,0.6,0.36,0.165,0.05,0.01)):
        if pr not in prices: continue
        node=lambda place: bisect_right(s.starts,place)-1
        end=last_held(s,{bit[t]:node(p) for t,p in r.dropped.items() if t in bit})
        ends[pr]=(end,held_at(s,end))
    print("prep",time.time()-t)
    for pct in shares:
        limit=W*pct/100
        res=[]
        for pr,(end,stored) in ends.items():
            t=time.time()
            n=48
            cuts=cheapest_cuts(m,stored,limit,1e-3,coarse(stored,n))
            S=start(m,cuts,end)
            t1=time.time(); e0=m.evaluated
            R=repair(S,limit,300,swaps=swaps)
            t2=time.time(); e1=m.evaluated
            if R is None:
                if verbose: print(pct,pr,"start %.3f over %d -> none"%(S.cost/V, sum(p>limit for p in S.peaks)),"%.2f s"%(t2-t1))
                continue
            res.append((R.cost,pr,R))
            if verbose: print(pct,pr,"start segs",S.count,"%.3f over %d"%(S.cost/V, sum(p>limit for p in S.peaks)),"-> repaired %.3f eor %.3f segs %d %.2fs ev %d"%(R.cost/V,R.step_us/V,R.count,t2-t1,e1-e0), flush=True)
        res.sort(key=lambda x:x[:2])
        best=None
        for cost,pr,R in res[:2]:
            t2=time.time(); e1=m.evaluated
            I=improve(R,limit,budget,swaps=swaps)
            t3=time.time(); e2=m.evaluated
            if best is None or I.cost<best.cost: best=I
            print("   ",pct,pr,"-> improved %.3f eor %.3f (re %.0f) segs %d swapped %d %.2fs ev %d"%(I.cost/V,I.step_us/V,sum(x.again_us for x in I.contents),I.count,len(I.swapped),t3-t2,e2-e1), flush=True)
if __name__=="__main__":
    import sys
    solve(sys.argv[1],[float(x) for x in sys.argv[2].split(",")], budget=int(sys.argv[3]) if len(sys.argv)>3 else 3000)

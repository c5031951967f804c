"""Apply rename tables to a tree.  usage: codemod.py ROOT TABLE.py [TABLE.py ...] [--dry]

A table is a Python file with `RULES = [...]`, applied in order. Rules (all take files=(globs...) default every .py and .md, exclude=(globs...)):
  name(old, new, text=False)   NAME tokens equal to `old`. text=True: also as a whole word inside comments, docstrings, strings and .md files
  attr(old, new)               NAME tokens after a dot:            x.old
  kwarg(old, new)              NAME tokens before `=` inside brackets: f(old=1), and parameters `old: T` in def lines   (not fields, not locals)
  regex(pattern, repl)         re.sub (multiline) on the whole text of each file, Python and Markdown alike (and .yaml, .toml, Makefile)
  callkw(func, old, new, first=None)  keyword arguments `old=` of calls whose callee's source matches the regex `func` fully (e.g. r"(.*\\.)?RouterConfig"); `first`: regex that the source of the first positional argument must match fully (for `replace(router, old=...)`)
  field(cls, old, new)         annotated field / method / assignment `old` directly in the body of class `cls` (regex)
  word(old, new)               whole word in comments, docstrings, strings and .md only (never code names)
Globs are matched with fnmatch against the path relative to the root ("megalith/plan/*" also matches below).
After it, all Python files must parse; a file that does not parse is reported and left unchanged by that rule.
"""
import ast,fnmatch,io,re,subprocess,sys,tokenize,runpy
from pathlib import Path
RULESET=[]
def _r(kind,*a,files=('*',),exclude=(),**k): return dict(kind=kind,a=a,files=(files,) if isinstance(files,str) else files,exclude=(exclude,) if isinstance(exclude,str) else exclude,**k)
def name(old,new,text=False,**k): return _r('name',old,new,text=text,**k)
def attr(old,new,**k): return _r('attr',old,new,**k)
def kwarg(old,new,**k): return _r('kwarg',old,new,**k)
def regex(p,r,**k): return _r('regex',p,r,**k)
def word(old,new,**k): return _r('word',old,new,**k)
def callkw(func,old,new,first=None,**k): return _r('callkw',old,new,func=func,first=first,**k)
def field(cls,old,new,**k): return _r('field',old,new,cls=cls,**k)
def toks(src): return list(tokenize.generate_tokens(io.StringIO(src).readline))
def sub_tokens(src,fn):
    lines=src.split('\n'); edits=[]
    T=toks(src)
    depth=0
    for i,t in enumerate(T):
        if t.type==tokenize.OP:
            if t.string in '([{': depth+=1
            elif t.string in ')]}': depth-=1
        new=fn(T,i,depth)
        if new is not None and new!=t.string: edits.append((t,new))
    for t,new in reversed(edits):
        (r1,c1),(r2,c2)=t.start,t.end
        if r1==r2: l=lines[r1-1]; lines[r1-1]=l[:c1]+new+l[c2:]
        else:
            head=lines[r1-1][:c1]; tail=lines[r2-1][c2:]
            lines[r1-1:r2]=(head+new+tail).split('\n')
    return '\n'.join(lines),len(edits)
def apply_in_tree(rule,path,src):
    k=rule['kind']; a=rule['a']; py=path.endswith('.py')
    old,new=a
    if not py or not re.search(r'(?<![A-Za-z0-9_])'+old+r'(?![A-Za-z0-9_])',src): return src,0
    tree=ast.parse(src); lines=src.split('\n'); pos=[]
    for n in ast.walk(tree):
        if k=='callkw' and isinstance(n,ast.Call):
            f=ast.unparse(n.func)
            if not re.fullmatch(rule['func'],f): continue
            if rule['first'] is not None and not (n.args and re.fullmatch(rule['first'],ast.unparse(n.args[0]))): continue
            pos+=[(kw.lineno,kw.col_offset) for kw in n.keywords if kw.arg==old]
        if k=='field' and isinstance(n,ast.ClassDef) and re.fullmatch(rule['cls'],n.name):
            for b in n.body:
                if isinstance(b,ast.AnnAssign) and isinstance(b.target,ast.Name) and b.target.id==old: pos.append((b.target.lineno,b.target.col_offset))
                if isinstance(b,ast.FunctionDef) and b.name==old:
                    l=lines[b.lineno-1]; pos.append((b.lineno,len(l[:l.index('def ')].encode())+4))
    for r,c in sorted(set(pos),reverse=True):
        l=lines[r-1].encode()
        assert l[c:c+len(old)].decode()==old,(path,r,l)
        lines[r-1]=(l[:c]+new.encode()+l[c+len(old):]).decode()
    return '\n'.join(lines),len(pos)
def apply(rule,path,src):
    k=rule['kind']; a=rule['a']; py=path.endswith('.py')
    if k=='regex':
        return re.subn(a[0],a[1],src,flags=re.M)
    if k in('callkw','field'): return apply_in_tree(rule,path,src)
    old,new=a; W=re.compile(r'(?<![A-Za-z0-9_])'+re.escape(old)+r'(?![A-Za-z0-9_])')
    if old not in src: return src,0
    if not py:
        if k=='word' or (k=='name' and rule.get('text')): return W.subn(new,src)
        return src,0
    def fn(T,i,depth):
        t=T[i]
        if t.type in (tokenize.STRING,tokenize.COMMENT):
            s=t.string
            if t.type==tokenize.STRING and re.match(r'[rR]?[fF][rR]?["\']',s) and k in('name','attr','kwarg'):
                # names inside replacement fields of f-strings
                def inner(m):
                    body=m.group(0)
                    if k=='attr': return re.sub(r'(?<=\.)'+re.escape(old)+r'(?![A-Za-z0-9_])',new,body)
                    if k=='kwarg': return re.sub(r'(?<![A-Za-z0-9_.])'+re.escape(old)+r'(?==[^=])',new,body)
                    return W.sub(new,body)
                out=re.sub(r'(?<!\{)\{(?!\{)[^{}]*(?:\{[^{}]*\}[^{}]*)*\}',inner,s)
                if rule.get('text'): out=W.sub(new,out)
                return out
            if k=='word' or (k=='name' and rule.get('text')): return W.sub(new,s)
            return None
        if t.type!=tokenize.NAME or t.string!=old: return None
        if k=='name': return new
        prev=T[i-1].string if i else ''
        nxt=T[i+1].string if i+1<len(T) else ''
        if k=='attr': return new if prev=='.' else None
        if k=='kwarg': return new if depth>0 and ((nxt=='=' and prev in('(',',','')) or (nxt=='=' and T[i-1].type in(tokenize.NL,tokenize.COMMENT)) ) else None
        return None
    return sub_tokens(src,fn)
def main():
    root=Path(sys.argv[1]); tables=[a for a in sys.argv[2:] if not a.startswith('--')]
    files=[f for f in subprocess.run(['git','ls-files'],cwd=root,capture_output=True,text=True).stdout.split('\n') if f.endswith(('.py','.md','.yaml','.toml','Makefile','.sh')) and (root/f).exists()]
    texts={f:(root/f).read_text() for f in files}
    before=dict(texts)
    for tb in tables:
        ns=runpy.run_path(tb,init_globals=dict(name=name,attr=attr,kwarg=kwarg,regex=regex,word=word,callkw=callkw,field=field))
        for rule in ns['RULES']:
            n=0;nf=0
            for f in files:
                if not any(fnmatch.fnmatch(f,g) for g in rule['files']) or any(fnmatch.fnmatch(f,g) for g in rule['exclude']): continue
                try: out,c=apply(rule,f,texts[f])
                except (tokenize.TokenError,SyntaxError,IndentationError) as e: print('TOKENIZE',f,e); continue
                if c and out!=texts[f]:
                    if f.endswith('.py'):
                        try: ast.parse(out)
                        except SyntaxError as e: print('SYNTAX',rule['a'],f,e); continue
                    texts[f]=out; n+=c; nf+=1
            if '--dry' in sys.argv or n==0 or '-v' in sys.argv: print(f"{rule['kind']:6} {rule['a'][0]!s:40.60} -> {rule['a'][1]!s:40.50} {n} in {nf} files")
    if '--dry' not in sys.argv:
        for f in files:
            if texts[f]!=before[f]: (root/f).write_text(texts[f])
main()

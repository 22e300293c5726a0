// SPDX-License-Identifier: Apache-2.0

package kpdiff

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/kubetest"
	"github.com/kpng-project/kpng/reconcile"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"github.com/kpng-project/kpng/watcher"
	"github.com/kpng-project/kpng/watcher/kube"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// process is a kpng that can be stopped and started again. Its dataplane stays.
type process struct {
	faults    faults
	settings  settings
	server    *kubetest.Server
	dataplane *dataplane

	tb     errorList
	cancel context.CancelFunc
	ended  chan error
	// stopInformers is nil unless the process has informers.
	stopInformers func()
}

// faults are deliberate faults in the parts of a process. Each field may be nil.
type faults struct {
	watch  func(context.Context, *cluster.State, kube.Options) error
	driver func(sink.Sink) sink.Sink
	view   func(*api.View) *api.View
}

type settings struct {
	ServiceProxyName        string
	Informers, FullState    bool
	OnlyJSON, Old, AllNodes bool
	BatchSize, MaxOps       int
	MinInterval             time.Duration
}

// configure chooses the settings of a history.
func (p *process) configure(r chance) {
	p.settings = settings{
		ServiceProxyName: pick(r, "", "", "kpng"), Informers: r.oneIn(4), FullState: r.oneIn(4),
		OnlyJSON: r.oneIn(8), Old: r.oneIn(8), AllNodes: r.oneIn(3),
		BatchSize: pick(r, 0, 1, 20), MaxOps: pick(r, 0, 1, 3), MinInterval: pick(r, 0, time.Second),
	}
	p.settings.Old = p.settings.Old && !p.settings.Informers // client-go's informers need a newer server
	p.server.OnlyJSON, p.server.Old = p.settings.OnlyJSON, p.settings.Old
}

// start starts the process. It does not wait.
func (p *process) start() {
	var s sink.Sink
	if p.settings.FullState {
		s = sink.FullState(p.dataplane.writeAll)
	} else {
		s = reconcile.New(p.dataplane, reconcile.Options[string, string]{MaxOps: p.settings.MaxOps})
	}
	p.dataplane.view = p.faults.view
	recorder := sink.Sink(sinktest.NewRecorder(&p.tb, s))
	if p.faults.driver != nil {
		recorder = p.faults.driver(s) // without the recorder, which would notice the fault
	}
	opts := kpng.Options{
		NodeName: thisNode, Services: watcher.Options{ServiceProxyName: p.settings.ServiceProxyName},
		Sinks: []kpng.Sink{{Sink: recorder, Options: sink.Options{BatchSize: p.settings.BatchSize, MinInterval: p.settings.MinInterval}}},
	}
	ctx, cancel := context.WithCancel(context.Background())
	p.cancel, p.ended = cancel, make(chan error, 1)
	from := kube.Options{Options: opts.Services, NodeName: thisNode}
	if p.settings.AllNodes {
		from.NodeName = ""
	}
	if p.settings.Informers {
		from.Informers, p.stopInformers = startInformers(p.server.Config())
	} else {
		from.Config = p.server.Config()
	}
	watch := kube.Watch
	if p.faults.watch != nil {
		watch = p.faults.watch
	}
	opts.Source = func(ctx context.Context, state *cluster.State) error { return watch(ctx, state, from) }
	go func() { p.ended <- kpng.Run(ctx, opts) }()
}

func startInformers(config *rest.Config) (*kube.Informers, func()) {
	factory := informers.NewSharedInformerFactory(kubernetes.NewForConfigOrDie(config), 0)
	all := &kube.Informers{
		Services: factory.Core().V1().Services().Informer(), EndpointSlices: factory.Discovery().V1().EndpointSlices().Informer(),
		Nodes: factory.Core().V1().Nodes().Informer(),
	}
	ctx, cancel := context.WithCancel(context.Background())
	factory.Start(ctx.Done())
	return all, func() {
		cancel()
		factory.Shutdown()
	}
}

// stop stops the process, if it runs, and waits until it has ended.
func (p *process) stop() {
	if p.cancel == nil {
		return
	}
	p.cancel()
	if err := <-p.ended; err != nil {
		p.tb.Errorf("kpng ended: %v", err)
	}
	if p.stopInformers != nil {
		p.stopInformers()
	}
	p.cancel, p.stopInformers = nil, nil
}

// failure returns the first broken rule that the recorder has noticed, or nil.
func (p *process) failure() error { return p.tb.first }

// errorList is a testing.TB for a recorder. It keeps the first error.
type errorList struct {
	testing.TB
	first error
}

func (l *errorList) Errorf(format string, args ...any) {
	if l.first == nil {
		l.first = fmt.Errorf(format, args...)
	}
}

// dataplane has an object for each frontend, and one for the health checks of a service in
// a family. The value begins with the namespace and name of the service.
type dataplane struct {
	view    func(*api.View) *api.View
	objects map[string]string
	random  *chance // not nil while operations fail
}

func newDataplane() *dataplane { return &dataplane{objects: map[string]string{}} }

// The key of an object of health checks is healthKey, the service and the family.
const healthKey = "health "

// Plan implements reconcile.Dataplane.
func (d *dataplane) Plan(view *api.View, emit func(k, v string)) error {
	if d.view != nil {
		view = d.view(view)
	}
	is := decidedBy(view)
	for at, text := range is.frontends {
		emit(at, view.Key().String()+" "+text)
	}
	for family, n := range is.health {
		emit(healthKey+view.Key().String()+" "+family, fmt.Sprintf("%s %d", view.Key(), n))
	}
	return nil
}

// List implements reconcile.Dataplane.
func (d *dataplane) List(_ context.Context, emit func(k, v string)) error {
	if d.random != nil && d.random.oneIn(3) {
		return fmt.Errorf("the dataplane cannot be listed")
	}
	for k, v := range d.objects {
		emit(k, v)
	}
	return nil
}

// Apply implements reconcile.Dataplane.
func (d *dataplane) Apply(_ context.Context, ops []reconcile.Op[string, string]) error {
	if d.random != nil && d.random.oneIn(4) {
		return reconcile.Refused(fmt.Errorf("refused"))
	}
	failed := reconcile.Failed[string]{}
	for i, op := range ops {
		switch {
		case d.random != nil && d.random.oneIn(12):
			return fmt.Errorf("the connection broke after %d operations", i)
		case d.random != nil && d.random.oneIn(4):
			failed[op.Key] = fmt.Errorf("failed")
		case op.New == nil:
			delete(d.objects, op.Key)
		default:
			d.objects[op.Key] = *op.New
		}
	}
	if len(failed) > 0 {
		return &failed
	}
	return nil
}

// writeAll replaces all objects.
func (d *dataplane) writeAll(_ context.Context, services []*api.View) error {
	if d.random != nil && d.random.oneIn(2) {
		return fmt.Errorf("the dataplane is busy")
	}
	clear(d.objects)
	for _, view := range services {
		if err := d.Plan(view, func(k, v string) { d.objects[k] = v }); err != nil {
			return err
		}
	}
	return nil
}

// disturb makes operations fail at random until calm is called.
func (d *dataplane) disturb(r chance) { d.random = &r }

func (d *dataplane) calm() { d.random = nil }

// decisions returns the decisions that the objects express, by namespace and name.
func (d *dataplane) decisions() map[string]decided {
	all := map[string]decided{}
	for k, v := range d.objects {
		service, text, _ := strings.Cut(v, " ")
		if _, ok := all[service]; !ok {
			all[service] = newDecided()
		}
		if rest, ok := strings.CutPrefix(k, healthKey); ok {
			_, family, _ := strings.Cut(rest, " ")
			n := 0
			fmt.Sscan(text, &n)
			all[service].health[family] = n
		} else {
			all[service].frontends[k] = text
		}
	}
	return all
}

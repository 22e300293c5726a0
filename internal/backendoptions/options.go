// SPDX-License-Identifier: Apache-2.0

// Package backendoptions has what all backends do with the options that they share: it
// checks them, sets their defaults, and passes events to their observer.
package backendoptions

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"reflect"
	"regexp"
	"slices"

	"github.com/kpng-project/kpng/backends"
)

const (
	defaultMark   = 0x2000
	kubeProxyMark = 0x4000
)

var podInterface = regexp.MustCompile(`^[A-Za-z0-9_.@:-]{1,15}$|^[A-Za-z0-9_.@:-]{1,14}\*$`)

// Complete checks the options that backends share, and sets the default of MasqueradeMark.
// The argument supported has the names of the fields that the backend supports. Complete
// refuses other fields that have a value. The argument podsKnown reports whether options of
// the backend itself define the pod network.
func Complete(o *backends.Options, podsKnown bool, supported ...string) error {
	errs := []error{checkSupported(o, supported)}
	if slices.Contains(supported, "MasqueradeMark") {
		o.MasqueradeMark = cmp.Or(o.MasqueradeMark, defaultMark)
		if bits.OnesCount32(o.MasqueradeMark) != 1 {
			errs = append(errs, fmt.Errorf("masquerade mark %#x is not a single bit", o.MasqueradeMark))
		}
		if o.MasqueradeMark == kubeProxyMark {
			errs = append(errs, fmt.Errorf("masquerade mark %#x is kube-proxy's", o.MasqueradeMark))
		}
	}
	for _, name := range o.PodInterfaces {
		if !podInterface.MatchString(name) {
			errs = append(errs, fmt.Errorf("%q is not an interface name", name))
		}
	}
	for _, cidr := range o.ClusterCIDRs {
		if !cidr.IsValid() {
			errs = append(errs, errors.New("a cluster CIDR is not valid"))
		}
	}
	if o.MasqueradeOutsiders && !podsKnown && !o.NodePodCIDRs && len(o.ClusterCIDRs)+len(o.PodInterfaces) == 0 {
		errs = append(errs, errors.New("masquerading outsiders needs CIDRs or interfaces of pods"))
	}
	if o.Sysctls > backends.IgnoreSysctls {
		errs = append(errs, fmt.Errorf("mode %d for kernel settings is unknown", o.Sysctls))
	}
	return errors.Join(errs...)
}

// checkSupported returns an error if fields have a value but are not in supported. The
// error names these fields.
func checkSupported(o *backends.Options, supported []string) error {
	var errs []error
	v := reflect.ValueOf(o).Elem()
	for i := range v.NumField() {
		name, field := v.Type().Field(i).Name, v.Field(i)
		isSet := !field.IsZero()
		if field.Kind() == reflect.Slice {
			isSet = field.Len() > 0
		}
		if isSet && !slices.Contains(supported, name) {
			errs = append(errs, fmt.Errorf("this backend does not support the option %s", name))
		}
	}
	return errors.Join(errs...)
}

// Observe returns an observer that forwards events to another observer. If that is nil,
// events are ignored. It forwards a call of Drifted only if its argument has changed. So a
// backend calls Drifted(false) whenever it finds that its dataplane is correct.
func Observe(to backends.Observer) backends.Observer { return &observer{to: to} }

type observer struct {
	to      backends.Observer // or nil
	drifted bool
}

func (o *observer) Wrote(size int, err error) {
	if o.to != nil {
		o.to.Wrote(size, err)
	}
}

func (o *observer) Holds(kind string, n int) {
	if o.to != nil {
		o.to.Holds(kind, n)
	}
}

func (o *observer) Drifted(now bool) {
	if o.to != nil && now != o.drifted {
		o.to.Drifted(now)
	}
	o.drifted = now
}

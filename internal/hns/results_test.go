// SPDX-License-Identifier: Apache-2.0

package hns

import (
	"errors"
	"testing"
)

func TestResultsMatchKubeProxyAndHcsshim(t *testing.T) {
	for name, test := range map[string]struct {
		code uint32
		want error
	}{
		"kube-proxy: HNS does not run":               {0x6b5, ErrNotRunning},
		"kube-proxy: the policy exists":              {0xb7, ErrExists},
		"hcsshim: the port exists":                   {0x803b0013, ErrExists},
		"hcsshim: element not found":                 {0x490, ErrNotFound},
		"hcsshim: not implemented":                   {0x80004001, ErrNotSupported},
		"hcsshim: not supported":                     {0x32, ErrNotSupported},
		"HNS stops in the middle of a call":          {0x6be, ErrNotRunning},
		"an invalid argument has no general meaning": {0x80070057, nil},
		"an invalid address has no general meaning":  {0x803b001e, nil},
	} {
		if got := results[test.code]; !errors.Is(got, test.want) {
			t.Errorf("%s: result %#x means %v, want %v", name, test.code, got, test.want)
		}
	}
}

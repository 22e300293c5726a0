// SPDX-License-Identifier: Apache-2.0

package nodeview
import "github.com/kpng-project/kpng/api"
type trace struct{}
func (t *trace) skipped(*api.EndpointSlice, *api.SliceEndpoint, Reason) {}
func (t *trace) decided(c *contest, p int, f api.Family, tt *tally, lo, hi int) {}
